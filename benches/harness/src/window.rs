//! One timed window, and the rule that says whether its threads really ran at once.
//!
//! ```text
//! thread 0   |-----------x-----------------|          x: off its CPU
//! thread 1      |------------------x----------|
//!            start                            end     whole = end - start
//!               |<------- common ---------->|
//!               overlap = (common - off-CPU time of every thread) / whole
//! ```
//!
//! The overlap is a lower bound of the part of the window in which every thread was on a CPU: in
//! the worst case no two threads were off at the same time.

use std::time::Duration;

/// The work of one thread in one window. `start` and `end` count from any moment that all threads of
/// the window share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// When the thread began to work.
    pub start: Duration,
    /// When it stopped.
    pub end: Duration,
    /// CPU time used between the two (`CLOCK_THREAD_CPUTIME_ID`).
    pub cpu: Duration,
    /// Operations done between the two.
    pub ops: u64,
}

impl Span {
    fn wall(&self) -> Duration {
        self.end.saturating_sub(self.start)
    }

    fn off_cpu(&self) -> Duration {
        self.wall().saturating_sub(self.cpu)
    }
}

/// The spans of all threads of one window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window {
    spans: Vec<Span>,
}

impl Window {
    /// Puts the spans of a window together.
    pub fn new(spans: Vec<Span>) -> Self {
        assert!(!spans.is_empty(), "a window has a thread");
        Self { spans }
    }

    /// The part of the window, 0 to 1, in which all threads surely ran at once.
    pub fn overlap(&self) -> f64 {
        let first_start = self.spans.iter().map(|span| span.start).min().unwrap_or_default();
        let last_start = self.spans.iter().map(|span| span.start).max().unwrap_or_default();
        let first_end = self.spans.iter().map(|span| span.end).min().unwrap_or_default();
        let last_end = self.spans.iter().map(|span| span.end).max().unwrap_or_default();
        let whole = last_end.saturating_sub(first_start).as_secs_f64();
        let common = first_end.saturating_sub(last_start).as_secs_f64();
        let off: f64 = self.spans.iter().map(|span| span.off_cpu().as_secs_f64()).sum();
        if whole > 0.0 { ((common - off) / whole).max(0.0) } else { 0.0 }
    }

    /// Operations per second of all threads together.
    pub fn throughput(&self) -> f64 {
        self.spans.iter().map(|span| span.ops as f64 / span.wall().as_secs_f64().max(1e-9)).sum()
    }

    /// Nanoseconds per operation, as each thread sees them.
    pub fn ns_per_op(&self) -> f64 {
        1e9 * self.spans.len() as f64 / self.throughput()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(start: u64, end: u64, cpu: u64, ops: u64) -> Span {
        let ms = Duration::from_millis;
        Span { start: ms(start), end: ms(end), cpu: ms(cpu), ops }
    }

    fn overlap(spans: &[Span]) -> f64 {
        (Window::new(spans.to_vec()).overlap() * 1000.0).round() / 1000.0
    }

    /// Two threads taking turns on one CPU: the false "2.0x" of a spin lock.
    #[test]
    fn threads_that_took_turns_do_not_overlap() {
        assert_eq!(overlap(&[span(0, 100, 50, 1), span(0, 100, 50, 1)]), 0.0);
    }
}
