use std::fs;

use super::*;

/// Returns the problems of a document with this text.
fn seeded(text: &str) -> Vec<String> {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("README.md"), text).unwrap();
    problems(directory.path()).unwrap()
}

/// Checks that there is exactly one problem, and that its message contains these words.
#[track_caller]
fn assert_problem(text: &str, words: &str) {
    let problems = seeded(text);
    assert!(problems.len() == 1 && problems[0].contains(words), "wanted {words}: {problems:#?}");
}

#[test]
fn this_repository() {
    let problems = problems(&root()).unwrap();
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// Returns the text between the markers of the table of supported features, if there are any.
fn support_table(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once("<!-- works:begin -->\n")?;
    Some(rest.split_once("<!-- works:end -->")?.0)
}

#[test]
fn the_readme_has_the_generated_table() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    if let Some(table) = support_table(&readme) {
        let wanted = crate::cases::matrix::table(&crate::cases::names());
        assert_eq!(table.trim(), wanted.trim(), "`guest-tests matrix` prints the table to be there");
    }
}

#[test]
fn a_table_between_markers_is_found() {
    assert_eq!(support_table("a\n<!-- works:begin -->\nb\n<!-- works:end -->\n"), Some("b\n"));
    assert_eq!(support_table("a\n<!-- works:begin -->\nb\n"), None);
}

/// The parameters in measurements and simulations of a slow line are those that the documents recommend.
#[test]
fn the_documents_have_the_parameters_of_a_slow_line() {
    let blocks = Document::read(&root().join("docs/congestion.md")).unwrap().blocks();
    let block = blocks.iter().find(|block| block.text.contains("[congestion]")).unwrap();
    let config = commands::configuration(&block.text).unwrap().unwrap();
    assert_eq!(config.networks[0].devices[0].rules.congestion, Some(pvrdma_roce::Congestion::slow_line()));
}

/// The tests that the page about hand-overs names exist.
#[test]
fn the_tests_of_kept_state_exist() {
    let page = fs::read_to_string(root().join("docs/kept.md")).unwrap();
    let code = |cell: &str| cell.trim().strip_prefix('`')?.strip_suffix('`').map(str::to_owned);
    let rows = page.lines().filter_map(|line| {
        let cells: Vec<_> = line.split('|').collect();
        let [_, _, file, test, _] = cells.as_slice() else { return None };
        Some((code(file)?, code(test)?))
    });
    let missing = |(file, test): &(String, String)| {
        let source = fs::read_to_string(root().join(file)).unwrap_or_default();
        !source.contains(&format!("#[test]\nfn {test}()"))
    };
    let rows: Vec<_> = rows.collect();
    assert!(rows.len() > 10, "{rows:?}");
    let missing: Vec<_> = rows.iter().filter(|row| missing(row)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn good_command_lines_are_good() {
    let text = "\
```sh
RUST_LOG=debug target/release/pvrdmad --control \"$RUN/control\" \\
    --device name=vm0,socket=\"$RUN/vm0.sock\",mac=52:54:00:00:00:01 &   # in the background
host1$ pvrdmad status --control /c --json | head; cargo run --release -p guest-tests -- bench --only wire && pvrdmad --help
vm() { qemu-system-x86_64 -device vmxnet3,netdev=n,mac=52:54:00:00:00:0$(($1 + 1)) \\
    -device '{\"socket\":{\"path\":\"'\"$RUN/vm$1.sock\"'\",\"type\":\"unix\"}}'; }
```
```text
pvrdmad --whatever 'is not closed
```
";
    assert_eq!(seeded(text), Vec::<String>::new());
}

#[test]
fn wrong_options_are_found() {
    assert_problem("```sh\npvrdmad status --controll /c\n```\n", "--controll");
    assert_problem("```bash\nhost1# sudo ./pvrdmad --device name=a,speed=9\n```\n", "speed");
    assert_problem("```sh\ncargo run --release -p guest-tests -- tets\n```\n", "tets");
    assert_problem("```sh\ntrue && guest-tests bench --rounds 3\n```\n", "--rounds");
}

#[test]
fn wrong_steps_of_workflows_are_found() {
    let steps = |command: &str| {
        format!(
            "```yaml\njobs:\n  a:\n    steps:\n      - uses: x\n      - name: Run it\n        run: |\n          true\n          {command}\n      - run: pvrdma-lab bed\n```\n"
        )
    };
    assert_eq!(seeded(&steps("out/pvrdma-lab run --vms 3 -- make check")), Vec::<String>::new());
    assert_problem(&steps("out/pvrdma-lab run --vm 3 -- make check"), "--vm");
    assert_problem(&steps("echo 'never closed"), "unexpected EOF");
    let of_a_job = |step: &str| format!("```yaml\njobs: {{a: {{steps: [{step}]}}}}\n```\n");
    assert_problem(&of_a_job("{run: pvrdma-lab bedd}"), "bedd");
    assert_problem(&of_a_job("{uses: x, with: {run: pvrdma-lab bedd}}"), "bedd");
    assert_problem(&of_a_job("["), "YAML");
    assert_problem("```sh\ncargo run --release -p pvrdma-lab -- run\n```\n", "COMMAND");
}

#[test]
fn wrong_scripts_are_found() {
    assert_problem("```sh\necho 'never closed\n```\n", "unexpected EOF");
    assert_problem("```sh\nfor peer in 1 2; echo $peer; done\n```\n", "syntax error");
}

#[test]
fn wrong_sockets_are_found() {
    let text = |qemu: &str| {
        format!(
            "```sh\npvrdmad --device name=a,socket=/run/a.sock,mac=52:54:00:00:00:01,nic=unix:/run/net.sock\n```\n\
             ```sh\nqemu-system-x86_64 {qemu}\n```\n"
        )
    };
    assert_eq!(seeded(&text("-device '{\"socket\":{\"path\":\"/run/a.sock\"}}'")), Vec::<String>::new());
    assert_problem(&text("-device '{\"socket\":{\"path\":\"/run/b.sock\"}}'"), "/run/b.sock");
    assert_problem(&text("-netdev stream,id=n,addr.path=/run/other.sock"), "/run/other.sock");
    assert_problem(&text("-device vmxnet3,netdev=n,mac=52:54:00:00:00:02"), "52:54:00:00:00:02");
    assert_problem(&text("-device '{\"socket\":{\"path\":\"/run/vm$1.sock\"}}'"), "/run/vm$1.sock");
}

#[test]
fn folders_of_every_user_are_found() {
    for language in ["text", "sh"] {
        assert_problem(&format!("```{language}\nls /tmp/a.sock\n```\n"), "every user can write to /tmp/");
    }
    assert_problem("```text\nls /dev/shm/a\n```\n", "README.md:2: every user");
    assert_eq!(seeded("`/tmp/a` is wrong\n```text\nls /run/tmp\n```\n"), Vec::<String>::new());
}

#[test]
fn wrong_configuration_is_found() {
    let device = "[[device]]\nname = \"vm0\"\nsocket = \"/run/vm0.sock\"\nmac = \"52:54:00:00:00:01\"\n";
    assert_eq!(seeded(&format!("```toml\n{device}```\n")), Vec::<String>::new());
    assert_problem(&format!("```toml\n{device}speed = 1\n```\n"), "speed");
}

#[test]
fn wrong_links_are_found() {
    let good = "# One word\n[a](#one-word) [b](README.md#again-1) [c](https://example.com/x) `[d](nowhere)`\n## Again\n## Again\n";
    assert_eq!(seeded(good), Vec::<String>::new());
    assert_problem("[a](nowhere.md)\n", "no such file");
    assert_problem("# Here\n[a](#there)\n", "no such heading");
    assert_problem("![a](picture.svg)\n", "no such file");
    assert_problem("[a][b]\n\n[b]: nowhere.md\n", "no such file");
}

#[test]
fn wrong_layout_is_found() {
    let (long, table) = ("word ".repeat(21), format!("| {} |\n", "cell ".repeat(30)));
    let good = format!("# Title\n\n{}\n{table}\n## Section\n\n### Part\n\n## Section\n", "word ".repeat(20).trim_end());
    assert_eq!(seeded(&good), Vec::<String>::new());
    assert_eq!(seeded(&format!("```text\n{long}\n### no heading\n```\n")), Vec::<String>::new());
    assert_problem(&format!("# Title\n\n{long}\n"), "README.md:3: prose beyond column 100");
    assert_problem("# Title\n\n### Part\n", "README.md:3: a heading of level 3 below one of level 1");
    assert_problem("## Section\n", "a heading of level 2 below one of level 0");
}

#[test]
fn source_files_that_do_not_exist_are_found() {
    let document = Document {
        path: PathBuf::from("a.md"),
        text: "`ring/mod.rs` and `core.rs`, `*.rs`\n`core/ring.rs`\n```text\n`no.rs`\n```\n".to_owned(),
    };
    let sources = [PathBuf::from("/r/src/ring/mod.rs"), PathBuf::from("/r/src/core.rs")];
    assert_eq!(sources::check(&document, &sources), ["a.md:2: core/ring.rs: there is no such source file"]);
}
