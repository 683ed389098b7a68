//! Every planted bug must fail the model that is about it.

use testkit::planted::Planted;

use super::{
    bare, bypass, completion, discard, engine, evict, invalidate, load, sync, task, write,
};

const PLANTED: Planted = Planted {
    mutants: &[
        bare::MUTANTS,
        bypass::MUTANTS,
        completion::MUTANTS,
        discard::MUTANTS,
        engine::MUTANTS,
        evict::MUTANTS,
        invalidate::MUTANTS,
        load::MUTANTS,
        sync::MUTANTS,
        task::MUTANTS,
        write::MUTANTS,
    ],
    loom_only: &[
        bare::LOOM_ONLY,
        completion::LOOM_ONLY,
        evict::LOOM_ONLY,
        task::LOOM_ONLY,
        write::LOOM_ONLY,
    ],
    root: env!("CARGO_MANIFEST_DIR"),
    dirs: &["src"],
};

// Some have no model under shuttle.
testkit::planted_tests!(PLANTED, #[cfg(offlock_loom)]);
