"""A server of bundles over HTTP; see docs/serving.md."""
