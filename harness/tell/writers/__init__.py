"""Writers: the same document as markdown, HTML, CSV or JSON."""
