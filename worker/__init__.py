"""Baton on the worker side: claim a task, run it, save every step, hand it on."""
