"""ps-lite's names as a part of the key-value tables, where programs import them from:
prpc_engine.pslite has them.
"""

from prpc_engine.pslite import *  # noqa: F403
from prpc_engine.pslite import __all__ as __all__
