//! A counter that adds on its own CPU.
