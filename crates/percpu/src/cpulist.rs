//! Sets of CPUs in the kernel's list format: `0-3,8,10-11`.
//!
//! Source: the `%*pbl` format of Linux (`lib/vsprintf.c`), which `/sys` uses for CPUs and memory
//! nodes alike: comma-separated numbers and ranges, an empty line for the empty set.

use std::fmt;
use std::iter;
use std::ops::RangeInclusive;
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
    #[must_use]
    pub fn last(&self) -> Option<CpuId> {
        self.cpus.last().copied()
    }

    /// Iterates over the CPUs, ascending.
    ///
    /// ```
    /// let list: offlock_percpu::CpuList = "0-1,4".parse()?;
    /// let ids: Vec<u32> = list.iter().map(offlock_percpu::CpuId::get).collect();
    /// assert_eq!(ids, [0, 1, 4]);
    /// # Ok::<(), offlock_percpu::CpuListError>(())
    /// ```
    pub fn iter(&self) -> iter::Copied<slice::Iter<'_, CpuId>> {
        self.cpus.iter().copied()
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
        let mut cpus: Vec<CpuId> = cpus.into_iter().collect();
        cpus.sort_unstable();
        cpus.dedup();
        Self { cpus }
    }
}

impl<'a> IntoIterator for &'a CpuList {
    type Item = CpuId;
    type IntoIter = iter::Copied<slice::Iter<'a, CpuId>>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// Writes the set in the kernel's format. Parsing the text gives an equal set.
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
        let mut cpus = Vec::new();
        for part in text.split(',') {
            cpus.extend(parse_run(part)?.map(CpuId::new));
        }
        Ok(cpus.into_iter().collect())
    }
}

/// Parses `7` or `4-7`.
fn parse_run(part: &str) -> Result<RangeInclusive<u32>, CpuListError> {
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
    Ok(first..=last)
}

#[cfg(test)]
mod tests;
