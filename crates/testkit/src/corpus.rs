//! The replay of a fuzz target's committed inputs.

use std::fs;
use std::path::Path;

/// Gives each input in `corpus` to `run`, which returns the number of steps that it made.
///
/// Does nothing if the folder does not exist: a packaged crate has no corpus.
///
/// # Panics
///
/// Panics if the corpus has fewer than `least_inputs` inputs, or all of them together make fewer
/// than `least_steps` steps: then the corpus no longer fits its target.
pub fn replay(
    corpus: impl AsRef<Path>,
    least_inputs: usize,
    least_steps: usize,
    mut run: impl FnMut(&[u8]) -> usize,
) {
    let Ok(corpus) = fs::read_dir(corpus) else { return };
    let (mut inputs, mut steps) = (0, 0);
    for entry in corpus {
        let path = entry.unwrap().path();
        println!("{}", path.display()); // shown if the input fails
        steps += run(&fs::read(&path).unwrap());
        inputs += 1;
    }
    println!("{inputs} inputs, {steps} steps");
    let complete = inputs >= least_inputs && steps >= least_steps;
    assert!(complete, "the corpus is incomplete: {inputs} inputs, {steps} steps");
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::process;

    use super::*;

    #[test]
    fn every_input_is_run_and_a_corpus_of_too_few_inputs_or_steps_is_refused() {
        const INPUTS: usize = 5;
        let folder = env::temp_dir().join(format!("testkit-corpus-{}", process::id()));
        fs::create_dir_all(&folder).unwrap();
        (0..INPUTS).for_each(|n| fs::write(folder.join(n.to_string()), [7]).unwrap());
        let mut runs = 0;
        let mut run = |inputs, steps| {
            let count = |input: &[u8]| {
                assert_eq!(input, [7]);
                runs += 1;
                1
            };
            catch_unwind(AssertUnwindSafe(|| replay(&folder, inputs, steps, count))).is_ok()
        };
        let outcomes = [(INPUTS, INPUTS), (INPUTS + 1, 1), (1, INPUTS + 1)]
            .map(|(inputs, steps)| run(inputs, steps));
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!((outcomes, runs), ([true, false, false], 3 * INPUTS));
    }
}
