//! Block I/O that reaps completions right after submitting.
