"""Scheduling: which rows the next step computes, whose blocks they live in, and the one thread that runs it."""
