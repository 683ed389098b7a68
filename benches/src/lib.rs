//! The harness every bench of the workspace shares.
