//! The random numbers of the simulator. They are integers, so a seed gives the same numbers on
//! every machine.

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number from 0 to `limit - 1`, or 0 if `limit` is 0.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        scale(self.next(), limit)
    }

    /// Returns true with a probability of `per_million` in a million.
    pub(crate) fn chance(&mut self, per_million: u32) -> bool {
        per_million > 0 && self.below(1_000_000) < per_million.into()
    }

    /// Returns an exponentially distributed number, by comparisons alone (von Neumann, "Various
    /// techniques used in connection with random digits", 1951): a falling run of uniform numbers
    /// has odd length with probability e^-first, and each run of even length adds one mean.
    pub(crate) fn exponential(&mut self, mean: u64) -> u64 {
        let mut means = 0u64;
        loop {
            let first = self.next();
            let (mut last, mut odd) = (first, true);
            loop {
                let next = self.next();
                if next >= last {
                    break;
                }
                (last, odd) = (next, !odd);
            }
            if odd {
                return means.saturating_mul(mean).saturating_add(scale(first, mean));
            }
            means += 1;
        }
    }
}

/// Returns the part `fraction / 2^64` of `whole`, rounded down.
fn scale(fraction: u64, whole: u64) -> u64 {
    ((u128::from(fraction) * u128::from(whole)) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_reference() {
        let mut random = Random::new(1_234_567);
        let first = [(); 3].map(|()| random.next());
        assert_eq!(
            first,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }

    #[test]
    fn exponential_has_its_mean_and_its_tail() {
        const TIMES: u64 = 200_000;
        let mut random = Random::new(7);
        let times: Vec<u64> = (0..TIMES).map(|_| random.exponential(1_000)).collect();
        let mean = times.iter().sum::<u64>() / TIMES;
        assert!((990..1010).contains(&mean), "mean {mean}");
        // e^-1, e^-2 and e^-5 of them exceed 1, 2 and 5 means; within 4 standard deviations.
        for (means, share) in [(1, 0.36788), (2, 0.13534), (5, 0.00674_f64)] {
            let longer = times.iter().filter(|&&time| time >= means * 1_000).count() as f64;
            let (wanted, n) = (share * TIMES as f64, TIMES as f64);
            let deviation = (n * share * (1.0 - share)).sqrt();
            assert!((longer - wanted).abs() < 4.0 * deviation, "{means}: {longer}, not {wanted}");
        }
    }

    #[test]
    fn chances_and_limits_hold_at_their_ends() {
        let mut random = Random::new(1);
        assert!((0..1000).all(|_| random.below(7) < 7));
        assert_eq!((random.below(0), random.below(1), random.exponential(0)), (0, 0, 0));
        assert!((0..1000).all(|_| !random.chance(0) && random.chance(1_000_000)));
        let hits = (0..100_000).filter(|_| random.chance(10_000)).count();
        assert!((800..1200).contains(&hits), "{hits}");
    }
}
