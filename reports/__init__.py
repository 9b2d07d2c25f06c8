"""Turns the files that runs wrote into reports for people."""
