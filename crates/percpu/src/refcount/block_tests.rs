//! Blocks of counts with one thread or a few; the stress tests are in `tests/`.

use offlock_sync::{Arc, thread};

use super::*;
use crate::fence::heavy_rseq;

const OPEN: u64 = 5 << 33;

/// Ends the life of count `i`. Returns true if no reference is left.
fn kill(block: &RefBlock, i: usize, gate: &AtomicU64) -> bool {
    gate.store(0, Ordering::Relaxed);
    heavy_rseq();
    block.fold(i)
}

fn put(block: &RefBlock, i: usize, gate: &AtomicU64) -> bool {
    // SAFETY: each test puts only references that it took, and keeps the block.
    unsafe { RefBlock::put(block, i, gate, OPEN) }
}

#[test]
fn inv21_each_count_of_a_block_ends_by_itself() {
    let block = RefBlock::try_new().unwrap();
    let gates = [(); RefBlock::COUNTS].map(|()| AtomicU64::new(0));
    for round in 0..3 {
        for (i, gate) in gates.iter().enumerate() {
            assert!(!block.try_get(i, gate, OPEN), "closed");
            block.open(i);
            gate.store(OPEN, Ordering::Release);
            for _ in 0..=i {
                assert!(block.try_get(i, gate, OPEN) && !block.try_get(i, gate, OPEN + 1));
            }
        }
        for (i, gate) in gates.iter().enumerate() {
            assert!(!put(&block, i, gate));
            assert_eq!(kill(&block, i, gate), i == 0, "round {round}, {i} are left");
            assert!(!block.try_get(i, gate, OPEN) && !block.try_get(i, gate, 1));
            block.get_more(i, gate, OPEN);
            for left in (0..=i).rev() {
                if i > 0 || left > 0 {
                    assert_eq!(put(&block, i, gate), left == 0);
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "word 64 of 64")]
fn an_index_beyond_the_block_panics() {
    let block = RefBlock::try_new().unwrap();
    let _ = block.try_get(RefBlock::COUNTS, &AtomicU64::new(0), 0);
}

/// The values that a block leaves in its words do not reach the next block in the same memory.
#[test]
fn inv21_a_new_block_starts_from_zero() {
    for _ in 0..200 {
        let (block, gate) = (RefBlock::try_new().unwrap(), AtomicU64::new(OPEN));
        block.open(63);
        assert!(block.try_get(63, &gate, OPEN) && block.try_get(63, &gate, OPEN));
        assert!(!kill(&block, 63, &gate));
        assert!(!put(&block, 63, &gate) && put(&block, 63, &gate));
    }
}

/// Threads take references and exit; other threads put them.
#[test]
fn inv21_exited_threads_leave_the_count_right() {
    let block = Arc::new(RefBlock::try_new().unwrap());
    let gate = Arc::new(AtomicU64::new(OPEN));
    block.open(3);
    let all = |f: fn(&RefBlock, &AtomicU64) -> u64| -> u64 {
        let threads = [(); 8].map(|()| {
            let (block, gate) = (Arc::clone(&block), Arc::clone(&gate));
            thread::spawn(move || f(&block, &gate))
        });
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    };
    assert_eq!(all(|block, gate| u64::from(block.try_get(3, gate, OPEN))), 8);
    assert!(!kill(&block, 3, &gate));
    assert_eq!(all(|block, gate| u64::from(put(block, 3, gate))), 1);
}

/// A fold leaves the words of sections unchanged, and the next fold counts only the difference.
#[test]
fn inv21_the_fold_counts_the_difference_only() {
    let (block, gate) = (RefBlock::try_new().unwrap(), AtomicU64::new(0));
    for life in 0..5 {
        block.open(9);
        gate.store(OPEN, Ordering::Release);
        for _ in 0..3 {
            assert!(block.try_get(9, &gate, OPEN));
        }
        assert!(!kill(&block, 9, &gate));
        assert_eq!(block.cold.counts[9].atomic.load(Ordering::Relaxed), 3, "life {life}");
        assert!(!put(&block, 9, &gate) && !put(&block, 9, &gate) && put(&block, 9, &gate));
    }
}
