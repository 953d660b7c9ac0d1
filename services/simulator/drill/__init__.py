"""The fault drill: real processes, real faults that are proven to have happened, and a checker."""
