//! A read-write gate: readers per CPU, one writer.
