use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

fn ids(list: &CpuList) -> BTreeSet<u32> {
    list.iter().map(CpuId::get).collect()
}

#[test]
fn parses_samples_of_the_kernel() {
    for (text, want) in [
        ("0\n", vec![0]),
        ("0-3\n", vec![0, 1, 2, 3]),
        ("0-1,4,6-7\n", vec![0, 1, 4, 6, 7]),
        ("\n", vec![]),
    ] {
        let list = CpuList::parse(text).unwrap();
        assert_eq!(ids(&list), want.into_iter().collect(), "{text:?}");
        assert_eq!(list.to_string(), text.trim());
    }
}

#[test]
fn refuses_text_that_the_kernel_never_writes() {
    let refused = |text: &str| CpuList::parse(text).unwrap_err();
    for text in ["a", "1,", ",1", "1-", "-1", "1--2", "+1", "1 2", "0-3:1/2"] {
        assert!(refused(text).contains("neither a CPU number nor a range"), "{text:?}");
    }
    assert_eq!(refused("3-1"), "range 3-1 runs backwards");
    for number in ["65536", "4294967295", "4294967296", "99999999999999999999"] {
        let too_large = format!("no CPU has the number {number} (limit 65536)");
        assert_eq!(refused(&format!("0-{number}")), too_large);
        assert_eq!(refused(number), too_large);
        assert_eq!(refused(&format!("{number}-0")), too_large);
    }
}

proptest! {
    /// A list with any order, overlap and repetition of runs is their union, and prints back.
    #[test]
    fn parses_to_the_union_of_its_runs_and_back(
        runs in prop::collection::vec((0_u32..300, 0_u32..12), 0..20),
    ) {
        let parts: Vec<String> = runs
            .iter()
            .map(|&(first, more)| match more {
                0 => first.to_string(),
                _ => format!("{first}-{}", first + more),
            })
            .collect();
        let list = CpuList::parse(&parts.join(",")).unwrap();
        let model: BTreeSet<u32> =
            runs.iter().flat_map(|&(first, more)| first..=first + more).collect();

        prop_assert_eq!(list.len(), model.len());
        prop_assert_eq!(list.is_empty(), model.is_empty());
        prop_assert_eq!(list.last().map(CpuId::get), model.last().copied());
        for id in 0..320 {
            prop_assert_eq!(list.contains(CpuId::new(id)), model.contains(&id));
        }
        prop_assert_eq!(CpuList::parse(&list.to_string()).unwrap(), list.clone());
        prop_assert_eq!(ids(&list), model);
    }

    /// No text causes a panic, and no text gives a CPU above the limit.
    #[test]
    fn any_text_is_a_small_set_or_an_error(text in "[0-9,\\- \n+a:]{0,24}|\\PC{0,24}") {
        if let Ok(list) = CpuList::parse(&text) {
            prop_assert!(list.last().is_none_or(|cpu| cpu.get() < MAX_CPUS));
            prop_assert_eq!(CpuList::parse(&list.to_string()), Ok(list));
        }
    }
}
