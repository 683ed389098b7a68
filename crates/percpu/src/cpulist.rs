//! Sets of CPUs in the kernel's list format: `0-3,8,10-11`.
//!
//! Source: the `%*pbl` format of Linux (`lib/vsprintf.c`), which `/sys` uses for CPUs and memory
//! nodes alike: comma-separated numbers and ranges, an empty line for the empty set.

use std::fmt;
use std::ops::RangeInclusive;

use offlock_sync::CpuId;

/// One past the largest CPU number that is accepted. A guess: eight times the largest number of
/// CPUs of an x86_64 kernel (8192). Without a limit a garbled file would cause gigabytes of
/// allocation.
pub(crate) const MAX_CPUS: u32 = 65_536;

/// A set of CPUs.
///
/// ```
/// let list: &offlock_percpu::CpuList = offlock_percpu::topology().possible();
/// assert!(list.iter().all(|cpu| list.contains(cpu)));
/// println!("{} possible CPUs: {list}", list.len()); // 8 possible CPUs: 0-7
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuList {
    /// Ascending, each number once.
    cpus: Vec<CpuId>,
}

impl CpuList {
    /// Makes the set of the CPUs `0..count`.
    pub(crate) fn first_n(count: u32) -> Self {
        Self { cpus: (0..count).map(CpuId::new).collect() }
    }

    /// Returns the number of CPUs in the set.
    #[must_use]
    pub fn len(&self) -> usize {
        self.cpus.len()
    }

    /// Returns whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.cpus.is_empty()
    }

    /// Returns whether `cpu` is in the set. Takes time logarithmic in the number of CPUs.
    #[must_use]
    pub fn contains(&self, cpu: CpuId) -> bool {
        self.cpus.binary_search(&cpu).is_ok()
    }

    /// Returns the CPU with the largest number.
    pub(crate) fn last(&self) -> Option<CpuId> {
        self.cpus.last().copied()
    }

    /// Iterates over the CPUs, ascending.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = CpuId> + ExactSizeIterator + Clone {
        self.cpus.iter().copied()
    }

    /// Parses the kernel's list format. Runs may come in any order and overlap. Space around the
    /// whole text is ignored. The error names the first wrong part.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let mut cpus = Vec::new();
        if !text.is_empty() {
            for part in text.split(',') {
                cpus.extend(parse_run(part)?.map(CpuId::new));
            }
        }
        cpus.sort_unstable();
        cpus.dedup();
        Ok(Self { cpus })
    }
}

/// Writes the set in the kernel's format.
impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let runs = self.cpus.chunk_by(|cpu, next| cpu.get() + 1 == next.get());
        for (nth, run) in runs.enumerate() {
            let (first, last) = (run[0].get(), run[run.len() - 1].get());
            let comma = if nth > 0 { "," } else { "" };
            match first == last {
                true => write!(f, "{comma}{first}")?,
                false => write!(f, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

/// Parses `7` or `4-7`.
fn parse_run(part: &str) -> Result<RangeInclusive<u32>, String> {
    let number = |digits: &str| {
        // `u32::from_str` would accept a plus sign.
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return Err(format!("{part:?} is neither a CPU number nor a range"));
        }
        let id = digits.parse().ok().filter(|&id| id < MAX_CPUS);
        id.ok_or_else(|| format!("no CPU has the number {digits} (limit {MAX_CPUS})"))
    };
    let (first, last) = part.split_once('-').unwrap_or((part, part));
    let (first, last) = (number(first)?, number(last)?);
    if first > last {
        return Err(format!("range {part} runs backwards"));
    }
    Ok(first..=last)
}

#[cfg(test)]
mod tests;
