"""Pictures of the report: one module each, a function of rows that gives a Vega-Lite specification."""
