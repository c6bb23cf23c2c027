"""Export: batches leave as OpenTelemetry spans and as files."""
