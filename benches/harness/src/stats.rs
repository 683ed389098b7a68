//! Medians and per-round ratios.

/// The ratios of the rounds of a comparison.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ratio {
    /// Their median: the figure.
    pub median: f64,
    /// The least of them.
    pub least: f64,
    /// The greatest of them.
    pub greatest: f64,
    /// The rounds with a ratio; of a figure without rounds, none.
    pub rounds: usize,
}

/// A figure without rounds.
impl From<f64> for Ratio {
    fn from(figure: f64) -> Self {
        Self { median: figure, least: figure, greatest: figure, rounds: 0 }
    }
}

impl Ratio {
    /// Of the ratios of some rounds; `None` without any.
    pub fn of(ratios: &[f64]) -> Option<Self> {
        let end = |f: fn(f64, f64) -> f64| ratios.iter().copied().reduce(f);
        let (least, greatest) = (end(f64::min)?, end(f64::max)?);
        Some(Self { median: median(ratios)?, least, greatest, rounds: ratios.len() })
    }

    /// The one whose median is lower: the worse of two throughputs.
    #[must_use]
    pub fn lower(self, other: Self) -> Self {
        if other.median < self.median { other } else { self }
    }

    /// With `f`, which grows or falls throughout, applied to each ratio.
    #[must_use]
    pub fn map(self, f: impl Fn(f64) -> f64) -> Self {
        let (one, other) = (f(self.least), f(self.greatest));
        let (least, greatest) = (one.min(other), one.max(other));
        Self { median: f(self.median), least, greatest, ..self }
    }
}

/// The value below which `percent` of the samples lie, interpolated between neighbours; `None`
/// without samples. NaN sorts last.
pub fn percentile(samples: &[f64], percent: f64) -> Option<f64> {
    assert!((0.0..=100.0).contains(&percent), "{percent} is not a percentage");
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1)?;
    let rank = last as f64 * percent / 100.0;
    let (below, above) = (sorted[rank.floor() as usize], sorted[rank.ceil() as usize]);
    Some(below + (above - below) * rank.fract())
}

/// The middle sample, or the mean of the middle two; `None` without samples.
pub fn median(samples: &[f64]) -> Option<f64> {
    percentile(samples, 50.0)
}

/// `numerator / denominator`, round by round. Rounds in which either is missing, or in which the
/// denominator is zero, give no ratio.
pub fn ratios(numerator: &[Option<f64>], denominator: &[Option<f64>]) -> Vec<f64> {
    let pairs = numerator.iter().zip(denominator);
    pairs
        .filter_map(|pair| match pair {
            (Some(n), Some(d)) if *d != 0.0 => Some(n / d),
            _ => None,
        })
        .collect()
}
