"""Whole checkouts that lie: each must come out red, with the true reason, and leave no process behind.

lies.py          what each one does to a copy of the reference, and what must be said of it
test_liars.py    gates them in a pytest process each, and looks at verdict, exit code and process table
test_command.py  the same through the command line a user types, server and all
"""
