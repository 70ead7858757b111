"""Pictures of the report: one module each, a function of rows that draws on a figure."""
