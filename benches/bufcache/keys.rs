//! Which page is asked for next: patterns, the same in every run.

use harness::Random;

/// `count` picks among 0 to `n`: the k-th most frequent has a share of 1 / k^`exponent`. Which number
/// is how frequent is random.
pub(crate) fn zipf(n: usize, exponent: f64, count: usize) -> Vec<u32> {
    let numbers = Random::new(n as u64).permutation(n);
    let mut random = Random::new(n as u64);
    let mut sums: Vec<f64> = Vec::with_capacity(n);
    let mut sum = 0.0;
    for rank in 1..=n {
        sum += (rank as f64).powf(-exponent);
        sums.push(sum);
    }
    let mut pick = || {
        let wanted = random.fraction() * sum;
        numbers[sums.partition_point(|&sum| sum < wanted).min(n - 1)]
    };
    (0..count).map(|_| pick()).collect()
}

/// 0 to `n`, over and over.
pub(crate) fn cycle(n: usize, count: usize) -> Vec<u32> {
    (0..count).map(|at| (at % n) as u32).collect()
}

/// Up through 0 to `n` and down again: what was left last comes back first.
pub(crate) fn zigzag(n: usize, count: usize) -> Vec<u32> {
    (0..n as u32).chain((0..n as u32).rev()).cycle().take(count).collect()
}

/// Each block is written, and read once after `n` others were written and as many read.
pub(crate) fn write_once_read_once(n: usize, count: usize) -> Vec<u32> {
    (0..count as u32 / 2).flat_map(|at| [at + n as u32, at]).collect()
}
