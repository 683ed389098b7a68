//! Sets of CPUs in the kernel's list format: `0-3,8,10-11`.
//!
//! Source: the `%*pbl` format of Linux (`lib/vsprintf.c`), which `/sys` uses for CPUs and memory
//! nodes alike: comma-separated numbers and ranges, an empty line for the empty set.

use std::fmt;
use std::iter::FusedIterator;
use std::slice;
use std::str::FromStr;

use crate::cpu_id::CpuId;

/// One past the largest CPU number that is accepted. A guess: eight times the largest number of
/// CPUs of an x86_64 kernel (8192). Without a limit a garbled file would cause gigabytes of
/// allocation.
pub(crate) const MAX_CPUS: u32 = 65_536;

/// A set of CPUs.
///
/// ```
/// let list: offlock_percpu::CpuList = "0-2,8\n".parse()?;
/// assert_eq!(list.len(), 4);
/// assert!(!list.contains(offlock_percpu::CpuId::new(5)));
/// assert_eq!(list.to_string(), "0-2,8");
/// # Ok::<(), offlock_percpu::CpuListError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuList {
    /// First and last CPU of each run. The runs ascend, and at least one number is between two.
    runs: Vec<(u32, u32)>,
}

impl CpuList {
    /// Makes the set of the CPUs `0..count`.
    pub(crate) fn first_n(count: u32) -> Self {
        Self { runs: count.checked_sub(1).map(|last| (0, last)).into_iter().collect() }
    }

    /// Returns the number of CPUs in the set.
    #[must_use]
    pub fn len(&self) -> usize {
        self.runs.iter().map(|&(first, last)| (last - first) as usize + 1).sum()
    }

    /// Returns whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Returns whether `cpu` is in the set. Takes time logarithmic in the number of runs.
    #[must_use]
    pub fn contains(&self, cpu: CpuId) -> bool {
        let after = self.runs.partition_point(|&(first, _)| first <= cpu.get());
        after > 0 && cpu.get() <= self.runs[after - 1].1
    }

    /// Returns the CPU with the largest number.
    #[must_use]
    pub fn last(&self) -> Option<CpuId> {
        self.runs.last().map(|&(_, last)| CpuId::new(last))
    }

    /// Iterates over the CPUs, ascending.
    #[must_use]
    pub fn iter(&self) -> CpuListIter<'_> {
        CpuListIter { runs: self.runs.iter(), run: None }
    }

    /// Sorts the runs and joins adjacent and overlapping ones.
    fn from_runs(mut runs: Vec<(u32, u32)>) -> Self {
        runs.sort_unstable();
        let mut joined: Vec<(u32, u32)> = Vec::with_capacity(runs.len());
        for (first, last) in runs {
            match joined.last_mut() {
                Some(run) if first <= run.1.saturating_add(1) => run.1 = run.1.max(last),
                _ => joined.push((first, last)),
            }
        }
        Self { runs: joined }
    }
}

/// Collects CPUs in any order. Repeated CPUs count once.
///
/// ```
/// let near: offlock_percpu::CpuList = [3, 1, 2, 1].map(offlock_percpu::CpuId::new).into_iter().collect();
/// assert_eq!(near.to_string(), "1-3");
/// ```
impl FromIterator<CpuId> for CpuList {
    fn from_iter<I: IntoIterator<Item = CpuId>>(cpus: I) -> Self {
        Self::from_runs(cpus.into_iter().map(|cpu| (cpu.get(), cpu.get())).collect())
    }
}

/// An iterator over the CPUs of a [`CpuList`], ascending. Made by [`CpuList::iter`].
///
/// ```
/// let list: offlock_percpu::CpuList = "0-1,4".parse()?;
/// let ids: Vec<u32> = list.iter().map(offlock_percpu::CpuId::get).collect();
/// assert_eq!(ids, [0, 1, 4]);
/// # Ok::<(), offlock_percpu::CpuListError>(())
/// ```
#[derive(Clone, Debug)]
pub struct CpuListIter<'a> {
    /// The runs behind `run`.
    runs: slice::Iter<'a, (u32, u32)>,
    /// First and last CPU of the rest of the current run.
    run: Option<(u32, u32)>,
}

impl Iterator for CpuListIter<'_> {
    type Item = CpuId;

    fn next(&mut self) -> Option<CpuId> {
        let (first, last) = self.run.take().or_else(|| self.runs.next().copied())?;
        self.run = (first < last).then(|| (first + 1, last));
        Some(CpuId::new(first))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.run.iter().chain(self.runs.clone());
        let left = left.map(|&(first, last)| (last - first) as usize + 1).sum();
        (left, Some(left))
    }
}

impl ExactSizeIterator for CpuListIter<'_> {}
impl FusedIterator for CpuListIter<'_> {}

impl<'a> IntoIterator for &'a CpuList {
    type Item = CpuId;
    type IntoIter = CpuListIter<'a>;

    fn into_iter(self) -> CpuListIter<'a> {
        self.iter()
    }
}

/// Writes the set in the kernel's format. Parsing the text gives an equal set.
impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (nth, &(first, last)) in self.runs.iter().enumerate() {
            if nth > 0 {
                f.write_str(",")?;
            }
            match first == last {
                true => write!(f, "{first}")?,
                false => write!(f, "{first}-{last}")?,
            }
        }
        Ok(())
    }
}

/// The reason why a text is not a set of CPUs.
///
/// ```
/// use offlock_percpu::{CpuList, CpuListError};
///
/// let error = "3-1".parse::<CpuList>().unwrap_err();
/// assert_eq!(error, CpuListError::Backwards(3, 1));
/// assert_eq!(error.to_string(), "range 3-1 runs backwards");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CpuListError {
    /// This part is neither a number nor two numbers with a dash between them.
    Malformed(String),
    /// This range ends before it starts.
    Backwards(u32, u32),
    /// This number, in decimal, is above the largest CPU number that is accepted (65535).
    TooLarge(String),
}

impl fmt::Display for CpuListError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed(part) => write!(f, "{part:?} is neither a CPU number nor a range"),
            Self::Backwards(first, last) => write!(f, "range {first}-{last} runs backwards"),
            Self::TooLarge(id) => write!(f, "no CPU has the number {id} (limit {MAX_CPUS})"),
        }
    }
}

impl std::error::Error for CpuListError {}

impl CpuListError {
    /// Returns the error as an errno: `EINVAL`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        libc::EINVAL
    }
}

impl From<CpuListError> for std::io::Error {
    fn from(error: CpuListError) -> Self {
        Self::new(std::io::ErrorKind::InvalidInput, error)
    }
}

impl FromStr for CpuList {
    type Err = CpuListError;

    /// Parses the kernel's list format. Runs may come in any order and overlap. Space around the
    /// whole text is ignored.
    ///
    /// # Errors
    ///
    /// [`CpuListError`] names the first wrong part.
    fn from_str(text: &str) -> Result<Self, CpuListError> {
        let text = text.trim();
        if text.is_empty() {
            return Ok(Self::default());
        }
        let runs = text.split(',').map(parse_run).collect::<Result<_, _>>()?;
        Ok(Self::from_runs(runs))
    }
}

/// Parses `7` or `4-7`.
fn parse_run(part: &str) -> Result<(u32, u32), CpuListError> {
    let number = |digits: &str| {
        // `u32::from_str` would accept a plus sign.
        let all_digits = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
        match digits.parse() {
            _ if !all_digits => Err(CpuListError::Malformed(part.to_string())),
            Ok(number) => Ok(number),
            Err(_) => Err(CpuListError::TooLarge(digits.to_string())),
        }
    };
    let (first, last) = match part.split_once('-') {
        Some((first, last)) => (number(first)?, number(last)?),
        None => (number(part)?, number(part)?),
    };
    if first > last {
        return Err(CpuListError::Backwards(first, last));
    }
    if last >= MAX_CPUS {
        return Err(CpuListError::TooLarge(last.to_string()));
    }
    Ok((first, last))
}

#[cfg(test)]
mod tests;
