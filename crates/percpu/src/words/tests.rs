use offlock_sync::atomic::Ordering;

use crate::cpu::CpuId;
use crate::words::{BLOCK, STRIDE, WordBlock, Words};

#[test]
fn inv18_words_of_different_cpus_are_pages_apart() {
    let words = Words::new().unwrap();
    let at: Vec<usize> = words.iter().map(|word| std::ptr::from_ref(word).addr()).collect();
    for pair in at.windows(2) {
        assert_eq!(pair[1] - pair[0], STRIDE);
    }
}

#[test]
fn returned_word_comes_back_as_zero() {
    for _ in 0..3 {
        let words: Vec<Words> = (0..100).map(|_| Words::new().unwrap()).collect();
        for word in words.iter().flat_map(Words::iter) {
            assert_eq!(word.swap(7, Ordering::Relaxed), 0);
        }
    }
}

#[test]
fn returned_block_comes_back_as_zero() {
    for _ in 0..3 {
        let blocks: Vec<_> = (0..300).map(|_| WordBlock::new().unwrap()).collect();
        for i in (0..BLOCK).rev() {
            for (n, block) in blocks.iter().enumerate() {
                for word in block.words(i).iter() {
                    let name = n * BLOCK + i + 1;
                    assert_eq!(word.swap(name as u64, Ordering::Relaxed), 0);
                }
            }
        }
        for (n, block) in blocks.iter().enumerate() {
            for i in 0..BLOCK {
                let name = (n * BLOCK + i + 1) as u64;
                assert!(block.words(i).iter().all(|w| w.load(Ordering::Relaxed) == name));
            }
        }
    }
}

#[test]
fn inv18_words_of_a_block_are_pages_apart_for_each_cpu() {
    let block = WordBlock::new().unwrap();
    let at = |i| -> Vec<usize> {
        block.words(i).iter().map(|word| std::ptr::from_ref(word).addr()).collect()
    };
    assert_eq!(at(0)[0] % (BLOCK * 8), 0);
    assert_eq!(at(BLOCK - 1)[0] - at(0)[0], (BLOCK - 1) * 8);
    for pair in at(BLOCK - 1).windows(2) {
        assert_eq!(pair[1] - pair[0], STRIDE);
    }
}

/// 10,000 words need more than one chunk. No two words overlap.
#[test]
fn words_of_two_chunks_do_not_overlap() {
    let words: Vec<Words> = (0..10_000).map(|_| Words::new().unwrap()).collect();
    let last = CpuId::new(crate::topology().capacity() as u32 - 1);
    for (i, words) in words.iter().enumerate() {
        words.slot(last).store(i as u64, Ordering::Relaxed);
    }
    for (i, words) in words.iter().enumerate() {
        assert_eq!(words.slot(last).load(Ordering::Relaxed), i as u64);
    }
}
