"""Documents, tokens and samples of a job."""
