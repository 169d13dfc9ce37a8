"""One thread's work: a reactor that looks at sources, runs tasks and timers, and sleeps when there
is nothing to do.

reactor         turns
queues          what waits to run, by classes
task_class      classes of work; which one a function is of
per_thread      a value for each thread
task, timers    what runs, and when
task_group      tasks that end with their block, and blocks that can be cancelled
waits           what a task awaits beside results: time, a turn, a function that blocks
readiness       the same: a descriptor
control         one loop a process for the engine's own coroutines
future          its result
callback        what an application has called at its end, and where
gate            who is inside
sync            semaphores and conditions of tasks
driver          which thread turns the reactor
control         one more reactor a process, in a thread of its own: for the engine's coroutines
asyncio_bridge  a reactor turned by a loop of asyncio
idle            spin, yield or park
interpreter_lock   other threads get it beside a loop that never waits
interrupts      signal handlers, held back until a step of the engine ends
stall           handlers that hold a turn for too long
"""
