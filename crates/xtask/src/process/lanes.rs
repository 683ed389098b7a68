//! Several commands at a time, one per CPU.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::error::Result;

/// Calls `run` for each item, on as many threads as there are CPUs, in order of the items.
///
/// All items run even if one fails. Returns the first failure.
pub(crate) fn each<T: Sync>(items: &[T], run: impl Fn(&T) -> Result<()> + Sync) -> Result<()> {
    let lanes = thread::available_parallelism().map_or(1, usize::from);
    let next = AtomicUsize::new(0);
    let failure = Mutex::new(None);
    thread::scope(|scope| {
        for _ in 0..lanes.min(items.len()) {
            scope.spawn(|| {
                // Ordering: Relaxed; the counter hands out indices and publishes nothing.
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(error) = run(item) {
                        failure.lock().unwrap().get_or_insert(error);
                    }
                }
            });
        }
    });
    failure.into_inner().unwrap().map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn each_item_runs_once_and_a_failure_is_returned() {
        let sum = AtomicUsize::new(0);
        let add = |item: &usize| {
            sum.fetch_add(*item, Ordering::Relaxed);
            if *item == 3 { Err(Error::new("three")) } else { Ok(()) }
        };
        assert_eq!(each(&[1, 2, 3, 4], add).unwrap_err().to_string(), "three");
        assert_eq!(sum.load(Ordering::Relaxed), 10);
        assert!(each(&[1, 2], add).is_ok());
        assert!(each(&[], add).is_ok());
    }
}
