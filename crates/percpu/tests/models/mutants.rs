//! Every planted bug must fail the model that is about it.

use offlock_percpu::sync::planted::{Planted, names_in};

use super::{counter, facade, fence, gate, lglock, rcu, ref_block, refcount, word_lock};

const PLANTED: Planted = Planted {
    mutants: &[
        counter::MUTANTS,
        facade::MUTANTS,
        fence::MUTANTS,
        gate::MUTANTS,
        lglock::MUTANTS,
        rcu::MUTANTS,
        ref_block::MUTANTS,
        refcount::MUTANTS,
        word_lock::MUTANTS,
    ],
    loom_only: &[
        counter::LOOM_ONLY,
        facade::LOOM_ONLY,
        fence::LOOM_ONLY,
        gate::LOOM_ONLY,
        lglock::LOOM_ONLY,
        rcu::LOOM_ONLY,
        ref_block::LOOM_ONLY,
        refcount::LOOM_ONLY,
        word_lock::LOOM_ONLY,
    ],
    root: env!("CARGO_MANIFEST_DIR"),
    dirs: &["src", "tests/models"],
};

#[test]
fn planted_mutants_are_caught() {
    PLANTED.assert_caught();
}

#[test]
fn a_mutant_that_does_not_exist_changes_nothing() {
    PLANTED.assert_control_passes();
}

#[test]
fn every_planted_mutant_has_a_model() {
    PLANTED.assert_listed();
}

/// A name that is missed would need no model.
#[test]
fn labels_and_names_are_found_in_a_source() {
    // A `#` stands for the `!`: this file is searched, too.
    let source = r#"
        fence#(SeqCst, "one: skips the fence");
        word.store(0, order#(Release, "two"));
        step#(
            "three, in lines of its own",
            word.store(0, order#(
                Relaxed,
                "four: inside another"
            )),
        );
        if !check#("five", word.load(Relaxed) == 0) && !mutant#("six") {}
        // step#("a comment", none());
        /// step#("documentation", none());
        crate_check#("another macro", 1); check#(no_label, 1); step#(1 == 2, "no label");
    "#
    .replace('#', "!")
    .replace("mutant!", "mutant");
    let found = names_in(&source);
    let expected = [
        "five",
        "four: inside another",
        "one: skips the fence",
        "six",
        "three, in lines of its own",
        "two",
    ];
    assert!(found.iter().map(String::as_str).eq(expected), "{found:?}");
}
