//! B1 to B3: pages that are there, by Zipf among many, and one that all want.

use std::sync::Arc;

use harness::{Case, Group, Plan, Ratio, Report, Rounds};

use crate::keys::zipf;
use crate::ours::Ours;
use crate::pages::{Pages, reads};
use crate::peers::{Bare, Moka, QuickPages};

/// The number of reads before they repeat. No branch predictor learns so many.
const READS: usize = 1 << 20;
/// The exponent of Zipf's law in YCSB.
const EXPONENT: f64 = 0.99;

pub(crate) fn run_64k(plan: &Plan, report: &mut Report) {
    let n = 1 << 16;
    let rounds = group(plan, report, "hit, 64k pages", n, &zipf(n, EXPONENT, READS));
    report.record("B1.quick_cache", over(&rounds, QuickPages::NAME, 1));
    report.record("B1.quick_cache_2t", over(&rounds, QuickPages::NAME, 2));
    report.record("B2.bare@64k", over(&rounds, Bare::NAME, 1));
}

/// Hits where the kernel backs no memory by huge pages.
pub(crate) fn run_64k_nohuge(plan: &Plan, report: &mut Report) {
    const NONE: libc::c_ulong = 0;
    let huge = |is_off: libc::c_ulong| {
        // SAFETY: the call takes numbers only, and changes how later memory is backed.
        unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, is_off, NONE, NONE, NONE) }
    };
    if huge(1) != 0 {
        return println!("# not measured: huge pages cannot be switched off");
    }
    let n = 1 << 16;
    let rounds = group(plan, report, "hit, 64k pages, none huge", n, &zipf(n, EXPONENT, READS));
    report.record("B1.nohuge.quick_cache", over(&rounds, QuickPages::NAME, 1));
    huge(0);
}

pub(crate) fn run_4k(plan: &Plan, report: &mut Report) {
    let n = 1 << 12;
    let rounds = group(plan, report, "hit, 4k pages", n, &zipf(n, EXPONENT, READS));
    report.record("B2.bare@4k", over(&rounds, Bare::NAME, 1));
}

pub(crate) fn run_hot(plan: &Plan, report: &mut Report) {
    let rounds = group(plan, report, "hit, one hot page", 1, &[0]);
    report.record("B1.quick_cache_hot_2t", over(&rounds, QuickPages::NAME, 2));
    report.record("B2.bare.hot", over(&rounds, Bare::NAME, 1));
    let (ours, hot) = Ours::sampled(1 << 12);
    let (ours, keys) = (Arc::new(ours), [hot]);
    let cases = plan.threads.iter().map(|&threads| reads(&ours, &keys, threads));
    let sampled = Group::new("hit, one hot page that is sampled").cases(cases).run(plan);
    report.show(&sampled);
    let scales = rounds.scale(Ours::NAME).zip(sampled.scale(Ours::NAME));
    report.record("B3.scale.hot", scales.map(|(any, sampled)| any.lower(sampled)));
}

/// Measures hits with room for a quarter more pages than there are, so that no cache evicts, even if it counts
/// room by parts.
fn group(plan: &Plan, report: &mut Report, name: &str, n: usize, keys: &[u32]) -> Rounds {
    let cases = [
        cases::<Ours>(plan, n, keys),
        cases::<Bare>(plan, n, keys),
        cases::<QuickPages>(plan, n, keys),
        cases::<Moka>(plan, n, keys),
    ];
    let rounds = Group::new(name).cases(cases.into_iter().flatten()).run(plan);
    report.compare(&rounds, &[Ours::NAME]);
    rounds
}

fn cases<'a, P: Pages>(plan: &Plan, n: usize, keys: &'a [u32]) -> Vec<Case<'a>> {
    let pages = Arc::new(P::filled(n, n + n / 4 + 64));
    plan.threads.iter().map(|&threads| reads(&pages, keys, threads)).collect()
}

fn over(rounds: &Rounds, peer: &str, threads: usize) -> Option<Ratio> {
    rounds.time_ratio(&format!("{}/{threads}", Ours::NAME), &format!("{peer}/{threads}"))
}
