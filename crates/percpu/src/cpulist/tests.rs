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
        let list: CpuList = text.parse().unwrap();
        assert_eq!(ids(&list), want.into_iter().collect(), "{text:?}");
        assert_eq!(list.to_string(), text.trim());
    }
}

#[test]
fn refuses_text_that_the_kernel_never_writes() {
    let refused = |text: &str| text.parse::<CpuList>().unwrap_err();
    for text in ["a", "1,", ",1", "1-", "-1", "1--2", "+1", "1 2", "0-3:1/2"] {
        assert!(matches!(refused(text), CpuListError::Malformed(_)), "{text:?}");
    }
    assert_eq!(refused("3-1"), CpuListError::Backwards(3, 1));
    for number in ["65536", "4294967295", "4294967296", "99999999999999999999"] {
        let too_large = CpuListError::TooLarge(number.to_string());
        assert_eq!(refused(&format!("0-{number}")), too_large);
        assert_eq!(refused(number), too_large);
    }
    assert_eq!(refused("99999999999-0"), CpuListError::TooLarge("99999999999".to_string()));
    let error = std::io::Error::from(refused("x"));
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
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
        let list: CpuList = parts.join(",").parse().unwrap();
        let model: BTreeSet<u32> =
            runs.iter().flat_map(|&(first, more)| first..=first + more).collect();

        prop_assert_eq!(list.len(), model.len());
        prop_assert_eq!(list.is_empty(), model.is_empty());
        prop_assert_eq!(list.last().map(CpuId::get), model.last().copied());
        for id in 0..320 {
            prop_assert_eq!(list.contains(CpuId::new(id)), model.contains(&id));
        }
        prop_assert_eq!(list.to_string().parse::<CpuList>().unwrap(), list.clone());
        prop_assert_eq!(ids(&list), model);
    }

    /// No text causes a panic, and no text gives a CPU above the limit.
    #[test]
    fn any_text_is_a_small_set_or_an_error(text in "[0-9,\\- \n+a:]{0,24}|\\PC{0,24}") {
        if let Ok(list) = text.parse::<CpuList>() {
            prop_assert!(list.last().is_none_or(|cpu| cpu.get() < MAX_CPUS));
            prop_assert_eq!(list.to_string().parse::<CpuList>(), Ok(list));
        }
    }
}
