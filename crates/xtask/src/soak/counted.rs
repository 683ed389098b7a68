//! What a log says about its counts.

/// The sums and counts in a log, in a few words; empty if no test has run.
pub(super) fn counted(log: &str) -> String {
    let (mut kills, mut writes, mut requests, mut passed) = (0, 0, 0, 0);
    let mut words: Vec<String> = Vec::new();
    for line in log.lines() {
        if let Some(count) = line.strip_prefix("test result: ok. ").and_then(leading_number) {
            passed += count;
        } else if let Some(count) = number_before(line, " ids checked") {
            words.push(format!("{count} ids checked"));
        } else if let Some((_, share)) = line.split_once(" random mutants caught, ") {
            words.push(format!("share {share} of random mutants"));
        } else if let Some(count) =
            line.split_once(" patches caught").and_then(|_| leading_number(line))
        {
            words.push(format!("{count} patches"));
        } else if let Some((_, rest)) = line.split_once(": requests ") {
            requests += leading_number(rest).unwrap_or(0);
        } else if let Some(count) = number_before(line, " kills, ") {
            kills += count;
            writes += number_before(line, " acknowledged writes").unwrap_or(0);
        } else if let Some(rest) = line.strip_prefix("stat::number_of_executed_units:") {
            words.extend(leading_number(rest.trim()).map(|count| format!("{count} inputs")));
        }
    }
    if kills > 0 {
        words.push(format!("kills {kills}, {writes} acknowledged writes"));
    }
    if requests > 0 {
        words.push(format!("{requests} requests"));
    }
    if passed > 0 {
        words.push(format!("{passed} tests"));
    }
    words.join(", ")
}

fn leading_number(text: &str) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..end].parse().ok()
}

/// The number that ends where `word` begins.
fn number_before(line: &str, word: &str) -> Option<u64> {
    let (before, _) = line.split_once(word)?;
    let start = before.rfind(|c: char| !c.is_ascii_digit()).map_or(0, |at| at + 1);
    before[start..].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::counted;

    #[test]
    fn tests_are_added_up_and_empty_runs_are_nothing() {
        let log = "test result: ok. 3 passed; 0 failed; 1 ignored\n\
                   test result: ok. 0 passed; 0 failed\n\
                   test result: ok. 12 passed; 0 failed\n";
        assert_eq!(counted(log), "15 tests");
        assert_eq!(counted("test result: ok. 0 passed; 0 failed\n"), "");
        assert_eq!(counted("test result: FAILED. 3 passed; 1 failed\n"), "");
        assert_eq!(counted(""), "");
    }

    #[test]
    fn kills_and_requests_are_added_up() {
        let log = "test tearing ... uring: 10 kills, 200 acknowledged writes\n\
                   threads: 5 kills, 50 acknowledged writes, 7 torn\n\
                   uring, file: requests 1000 completed 900 in time\n\
                   aio: requests 23 completed\n\
                   test result: ok. 2 passed; 0 failed\n";
        assert_eq!(counted(log), "kills 15, 250 acknowledged writes, 1023 requests, 2 tests");
    }

    #[test]
    fn ids_and_inputs_are_named() {
        let log = "section: 1000000 ids checked\nstat::number_of_executed_units: 4711\n\
                   stat::average_exec_per_sec:     9\n";
        assert_eq!(counted(log), "1000000 ids checked, 4711 inputs");
        let log = "9 of 9 patches caught\na: 18 of 20 random mutants caught, 0.90\n  survived: b\n";
        assert_eq!(counted(log), "9 patches, share 0.90 of random mutants");
    }
}
