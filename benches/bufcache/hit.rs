//! B1 to B3: pages that are there, by Zipf among many, and one that all want.

use harness::{Group, Plan, Report, Rounds};

use crate::keys::zipf;
use crate::ours::Ours;
use crate::pages::{Pages, reads};
use crate::peers::{Bare, Dash, Lru, Moka, Quick};

/// So many reads before they repeat: no branch predictor learns them.
const READS: usize = 1 << 20;
/// As YCSB has it.
const EXPONENT: f64 = 0.99;

pub(crate) fn run_64k(plan: &Plan, report: &mut Report) {
    let n = 1 << 16;
    let rounds = group(plan, report, "hit, 64k pages", n, &zipf(n, EXPONENT, READS));
    report.record("B1.quick_cache", over(&rounds, Quick::NAME, 1));
    report.record("B1.quick_cache_2t", over(&rounds, Quick::NAME, 2));
    report.record("B2.bare@64k", over(&rounds, Bare::NAME, 1));
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
    report.record("B3.scale.hot", scales.map(|(any, sampled)| any.min(sampled)));
}

/// With a quarter more room than pages: nothing is evicted, even where room is counted by parts.
fn group(plan: &Plan, report: &mut Report, name: &str, n: usize, keys: &[u32]) -> Rounds {
    let room = n + n / 4 + 64;
    let ours = Ours::filled(n, room);
    let (bare, quick) = (Bare::filled(n, room), Quick::filled(n, room));
    let (moka, lru, dash) = (Moka::filled(n, room), Lru::filled(n, room), Dash::filled(n, room));
    #[cfg(feature = "foyer")]
    let foyer = crate::peers::Foyer::filled(n, room);
    let mut group = Group::new(name);
    for &threads in &plan.threads {
        group = group.case(reads(&ours, keys, threads)).case(reads(&bare, keys, threads));
        group = group.case(reads(&quick, keys, threads)).case(reads(&moka, keys, threads));
        group = group.case(reads(&lru, keys, threads)).case(reads(&dash, keys, threads));
    }
    #[cfg(feature = "foyer")]
    for &threads in &plan.threads {
        group = group.case(reads(&foyer, keys, threads));
    }
    let rounds = group.run(plan);
    report.show(&rounds);
    let mut peers = vec![Bare::NAME, Quick::NAME, Moka::NAME, Lru::NAME, Dash::NAME];
    if cfg!(feature = "foyer") {
        peers.push("foyer");
    }
    report.against(&rounds, Ours::NAME, 1, &peers);
    report.against(&rounds, Ours::NAME, 2, &peers);
    rounds
}

fn over(rounds: &Rounds, peer: &str, threads: usize) -> Option<f64> {
    rounds.time_ratio(&format!("{}/{threads}", Ours::NAME), &format!("{peer}/{threads}"))
}
