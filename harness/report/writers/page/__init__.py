"""Parts of a report's page: tables that sort, the filter, styles and scripts."""
