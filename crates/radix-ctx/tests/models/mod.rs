//! Models of the table and the array, run by loom in every interleaving and by shuttle in random ones.
//! Nodes have two slots here, so that a few entries make a high tree.
//!
//! A planted bug is named by `mutant("...")`, in a model or in the crate; [`mutants`] demands that
//! each is caught.

mod mutants;
mod quota;
mod table;
mod table_refs;
mod xarray;
