"""What both products stand on: settings, runs, files, shards, precision, seeds, memory, errors."""
