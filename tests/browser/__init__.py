"""Tests of the HTML report in headless Chromium. `make test-browser` requires the browser."""
