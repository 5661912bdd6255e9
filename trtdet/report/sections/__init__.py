"""The sections of a report; each is made by one function from the results of a run."""
