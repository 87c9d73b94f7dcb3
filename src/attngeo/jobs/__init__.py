"""What one rule of the workflow does: read the preset, compute, write records, tell the tracker."""
