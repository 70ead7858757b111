"""Pictures of the report: functions of rows that give a Vega-Lite specification."""
