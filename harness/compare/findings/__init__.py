"""What a comparison must tell its reader: one module per concern, each a pure function of rows."""
