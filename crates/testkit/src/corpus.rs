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
    use std::path::PathBuf;
    use std::process;

    use super::*;

    const INPUTS: usize = 5;

    /// A folder of `INPUTS` files, removed at the end.
    struct Inputs(PathBuf);

    impl Inputs {
        fn new(name: &str) -> Self {
            let folder = env::temp_dir().join(format!("testkit-{name}-{}", process::id()));
            fs::create_dir_all(&folder).unwrap();
            (0..INPUTS).for_each(|n| fs::write(folder.join(n.to_string()), [7]).unwrap());
            Self(folder)
        }
    }

    impl Drop for Inputs {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn every_input_is_run() {
        let (inputs, mut runs) = (Inputs::new("every-input"), 0);
        replay(&inputs.0, INPUTS, INPUTS, |input| {
            assert_eq!(input, [7]);
            runs += 1;
            1
        });
        assert_eq!(runs, INPUTS);
    }

    #[test]
    #[should_panic(expected = "the corpus is incomplete")]
    fn a_corpus_of_too_few_inputs_is_refused() {
        replay(&Inputs::new("too-few").0, INPUTS + 1, 1, |_| 1);
    }

    #[test]
    #[should_panic(expected = "the corpus is incomplete")]
    fn a_corpus_of_too_few_steps_is_refused() {
        replay(&Inputs::new("too-few-steps").0, INPUTS, 1, |_| 0);
    }
}
