//! The pages that are requested: patterns, the same in every run.

use harness::Random;

/// `count` picks among 0 to `n`: the k-th most frequent has a share of 1 / k^`exponent`. Which number
/// is how frequent is random.
pub(crate) fn zipf(n: usize, exponent: f64, count: usize) -> Vec<u32> {
    let numbers = Random::new(n as u64).permutation(n);
    let ranks = zipf_ranks(n, exponent, count);
    ranks.into_iter().map(|rank| numbers[rank as usize]).collect()
}

/// Returns Zipf-distributed numbers of which 0 is the most frequent, then 1, and so on.
fn zipf_ranks(n: usize, exponent: f64, count: usize) -> Vec<u32> {
    let mut random = Random::new(n as u64);
    let mut sums: Vec<f64> = Vec::with_capacity(n);
    let mut sum = 0.0;
    for rank in 1..=n {
        sum += (rank as f64).powf(-exponent);
        sums.push(sum);
    }
    let mut pick = || {
        let wanted = random.fraction() * sum;
        sums.partition_point(|&sum| sum < wanted).min(n - 1) as u32
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

/// Zipf among `n` blocks, of which the most frequent tenth is another one after every `n` requests.
pub(crate) fn shifting_zipf(n: usize, exponent: f64, count: usize) -> Vec<u32> {
    let shift = |(at, key): (usize, u32)| ((key as usize + at / n * (n / 10)) % n) as u32;
    // By rank, so that the shift replaces the most frequent ones.
    zipf_ranks(n, exponent, count).into_iter().enumerate().map(shift).collect()
}
