"""Calling a service that several servers may answer.

client                 RpcClient
stub                   typed stubs
dealer                 requests and answers without waiting
mailbox                what arrived for a dealer
dispatcher             what happens to a call from submit() to its end: where it goes, and what
                       follows a failure
directory              which servers there are
balance                which of them is next
route                  the way to one
retry, hedge, hedging  second attempts
call_figures           how calls ended, and how long they took
"""
