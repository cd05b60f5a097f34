"""Where records go: one file a sink, one row in ``build_sinks``."""
