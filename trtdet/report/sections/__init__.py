"""The sections of a report: each a function from what a run measured."""
