//! One slot of any type per CPU.
