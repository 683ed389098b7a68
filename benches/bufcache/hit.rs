//! B1 to B3: pages that are there, by Zipf among many, and one that all want.

use harness::{Group, Plan, Ratio, Report, Rounds};

use crate::keys::zipf;
use crate::ours::Ours;
use crate::pages::{Pages, reads};
use crate::peers::{Bare, Lru, Moka, Quick};

/// The number of reads before they repeat. No branch predictor learns so many.
const READS: usize = 1 << 20;
/// The exponent of Zipf's law in YCSB.
const EXPONENT: f64 = 0.99;

pub(crate) fn run_64k(plan: &Plan, report: &mut Report) {
    let n = 1 << 16;
    let rounds = group(plan, report, "hit, 64k pages", n, &zipf(n, EXPONENT, READS));
    report.record("B1.quick_cache", over(&rounds, Quick::NAME, 1));
    report.record("B1.quick_cache_2t", over(&rounds, Quick::NAME, 2));
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
    report.record("B1.nohuge.quick_cache", over(&rounds, Quick::NAME, 1));
    huge(0);
}

pub(crate) fn run_4k(plan: &Plan, report: &mut Report) {
    let n = 1 << 12;
    let rounds = group(plan, report, "hit, 4k pages", n, &zipf(n, EXPONENT, READS));
    report.record("B2.bare@4k", over(&rounds, Bare::NAME, 1));
}

pub(crate) fn run_hot(plan: &Plan, report: &mut Report) {
    let rounds = group(plan, report, "hit, one hot page", 1, &[0]);
    report.record("B1.quick_cache_hot_2t", over(&rounds, Quick::NAME, 2));
    report.record("B2.bare.hot", over(&rounds, Bare::NAME, 1));
    let (ours, hot) = Ours::sampled(1 << 12);
    let keys = [hot];
    let mut group = Group::new("hit, one hot page that is sampled");
    for &threads in &plan.threads {
        group = group.case(reads(&ours, &keys, threads));
    }
    let sampled = group.run(plan);
    report.show(&sampled);
    let scale = |rounds: &Rounds| {
        rounds.tput_ratio(&format!("{}/2", Ours::NAME), &format!("{}/1", Ours::NAME))
    };
    let scales = scale(&rounds).zip(scale(&sampled));
    report.record("B3.scale.hot", scales.map(|(any, sampled)| any.lower(sampled)));
}

/// Measures hits with room for a quarter more pages than there are, so that no cache evicts, even if it counts
/// room by parts.
fn group(plan: &Plan, report: &mut Report, name: &str, n: usize, keys: &[u32]) -> Rounds {
    let room = n + n / 4 + 64;
    let ours = Ours::filled(n, room);
    let (bare, quick) = (Bare::filled(n, room), Quick::filled(n, room));
    let (moka, lru) = (Moka::filled(n, room), Lru::filled(n, room));
    let mut group = Group::new(name);
    for &threads in &plan.threads {
        group = group.case(reads(&ours, keys, threads)).case(reads(&bare, keys, threads));
        group = group.case(reads(&quick, keys, threads)).case(reads(&moka, keys, threads));
        group = group.case(reads(&lru, keys, threads));
    }
    let rounds = group.run(plan);
    report.show(&rounds);
    let peers = [Bare::NAME, Quick::NAME, Moka::NAME, Lru::NAME];
    report.against(&rounds, Ours::NAME, 1, &peers);
    report.against(&rounds, Ours::NAME, 2, &peers);
    rounds
}

fn over(rounds: &Rounds, peer: &str, threads: usize) -> Option<Ratio> {
    rounds.time_ratio(&format!("{}/{threads}", Ours::NAME), &format!("{peer}/{threads}"))
}
