//! Numbers that look random, the same in every run.

/// xorshift64.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator of its own row of numbers for each seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Any but 0.
    #[expect(clippy::should_implement_trait, reason = "it has no end")]
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        ((u128::from(self.next()) * limit as u128) >> 64) as usize
    }

    /// From 0 on, below 1.
    pub fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// 0 to `n` in random order, without `n`: Fisher and Yates.
    pub fn permutation(&mut self, n: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..n as u32).collect();
        for at in (1..n).rev() {
            order.swap(at, self.below(at + 1));
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stay_within_their_bounds_and_come_again() {
        for seed in [0, 1, u64::MAX] {
            let mut random = Random::new(seed);
            let mut tens = [0; 10];
            for _ in 0..1_000 {
                tens[random.below(10)] += 1;
                assert!((0.0..1.0).contains(&random.fraction()));
            }
            assert!(tens.iter().all(|count| (50..200).contains(count)), "{tens:?}");
            let (mut one, mut other) = (random.clone(), random);
            assert_eq!(one.permutation(100), other.permutation(100));
        }
    }
}
