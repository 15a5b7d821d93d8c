//! The report in a real browser: the console stays empty, filters and keys work, nothing is wider than a phone. Needs
//! `chromium` on the path and passes with a note where it is not installed.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The browser, if there is one.
fn chromium() -> Option<PathBuf> {
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let folders: Vec<PathBuf> = std::env::split_paths(&std::env::var_os("PATH")?).collect();
    names.iter().flat_map(|n| folders.iter().map(move |f| f.join(n))).find(|p| p.is_file())
}

/// Script inserted at the start of the page: records every error.
const WATCH: &str = "<script>window.wrong = [];
addEventListener('error', (e) => wrong.push(String(e.message)));
addEventListener('unhandledrejection', (e) => wrong.push(String(e.reason)));
for (const kind of ['error', 'warn']) console[kind] = (...words) => wrong.push(words.join(' '));
</script>";

/// Script appended to the page: uses it as a reader would and writes the results into an element.
const USE: &str = r#"<script>
const count = (selector) => document.querySelectorAll(selector).length;
const dots = () => count('#pareto g[aria-label="dot"] circle');
const press = (node, key) => node.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
const found = {};
found.maps = count('#maps svg');
found.cells = count('#maps svg:first-of-type g[aria-label="cell"] rect') / count('#maps svg');
found.dots = dots();
const kernel = document.querySelector('input[data-filter="kernel"]');
kernel.click();
found.dotsWithout = dots();
found.rowsWithout = [...document.querySelectorAll('#methods-table tr')].filter((r) => !r.hidden).length;
document.querySelectorAll('input[data-filter]').forEach((box) => box.checked && box.click());
found.dotsNone = dots();
document.querySelectorAll('input[data-filter]').forEach((box) => box.click());
found.dotsAgain = dots();
const pareto = document.querySelector('#pareto svg');
press(pareto, 'ArrowRight');
press(pareto, 'ArrowRight');
found.told = document.getElementById('front-status').textContent;
const cost = document.getElementById('cost');
for (const option of ['bytes', 'keys', 'seconds']) {
  cost.value = option;
  cost.dispatchEvent(new Event('change'));
  found[option] = dots();
}
document.getElementById('after').click();
found.head = document.getElementById('head').value;
found.images = count('#head-view img');
const map = document.querySelector('#maps svg');
press(map, 'ArrowDown');
found.toldOfMap = document.getElementById('map-status').textContent;
press(map, 'Enter');
found.headByKey = document.getElementById('head').value;
found.recipe = count('#recipe-map g[aria-label="cell"] rect');
document.getElementById('theme').click();
found.theme = document.documentElement.dataset.theme;
found.paper = getComputedStyle(document.body).backgroundColor;
found.formulas = count('math');
found.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
found.wrong = wrong;
const verdict = document.createElement('pre');
verdict.id = 'verdict';
verdict.textContent = JSON.stringify(found);
document.body.append(verdict);
</script>"#;

/// Opens a page and returns its document after all scripts have run, and the browser's messages.
fn open(browser: &Path, page: &Path, profile: &Path) -> (String, String) {
    let output = Command::new(browser)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--enable-logging=stderr",
        ])
        .args(["--window-size=390,844", "--virtual-time-budget=4000", "--dump-dom"])
        .arg(format!("--user-data-dir={}", profile.display()))
        .arg(format!("file://{}", page.display()))
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (text(output.stdout), text(output.stderr))
}

#[test]
fn a_report_works_in_a_browser() {
    let Some(browser) = chromium() else {
        eprintln!("not run: there is no chromium on the path");
        return;
    };
    let folder = std::env::temp_dir().join(format!("attlas-browser-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = |name: &str| folder.join(name);
    std::fs::write(
        file("recipe.toml"),
        "version = 1\n[evidence]\nppl = 12.0\nexact_ppl = 10.0\nseconds = 1.0\nexact_seconds = 2.0\n\
         [[rule]]\nlayers = \"1\"\nheads = \"0-1\"\nmethod = \"hyper\"\nmeasured = { error = 0.1, cost = 0.5 }\n",
    )
    .unwrap();
    let made = Command::new(env!("CARGO_BIN_EXE_attlas"))
        .args([
            "report",
            "synthetic:clustered,n=128,d=8,heads=3",
            "--methods",
            "top_k,sink_window,performer,hyper",
        ])
        .args([
            "--set",
            "top_k.keys=8",
            "--set",
            "sink_window.window=8",
            "--set",
            "hyper.samples=8",
            "--seeds",
            "2",
        ])
        .args(["--set", "hyper.block=8", "--set", "hyper.n_min=32", "--recipe"])
        .arg(file("recipe.toml"))
        .arg("--out")
        .arg(file("report.html"))
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let page = std::fs::read_to_string(file("report.html")).unwrap();
    let page = page.replacen("<head>", &format!("<head>{WATCH}"), 1);
    let end = page.rfind("</body>").unwrap();
    std::fs::write(file("tried.html"), format!("{}{USE}{}", &page[..end], &page[end..])).unwrap();
    let (document, said) = open(&browser, &file("tried.html"), &file("profile"));
    let verdict = document.split("<pre id=\"verdict\">").nth(1).and_then(|x| x.split("</pre>").next());
    let verdict = verdict.unwrap_or_else(|| panic!("the page did not run to its end: {said}"));
    let x: serde_json::Value =
        serde_json::from_str(&verdict.replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))
            .unwrap();
    assert_eq!(x["wrong"], serde_json::json!([]), "{x}");
    assert!(!said.contains("CONSOLE"), "{said}");
    assert_eq!((&x["maps"], &x["cells"]), (&8.into(), &3.into()), "{x}");
    let number = |name: &str| x[name].as_u64().unwrap_or_else(|| panic!("{name}: {x}"));
    // Four methods, the baseline and exact attention, less the kernel method, and exact attention alone.
    assert_eq!(
        (number("dots"), number("dotsWithout"), number("dotsNone"), number("dotsAgain")),
        (6, 5, 1, 6)
    );
    assert_eq!(number("rowsWithout"), 1 + 4);
    assert!(number("bytes") >= 3 && number("seconds") == 6, "{x}");
    assert!(number("keys") >= 2, "features compute no scores: {x}");
    assert!(x["told"].as_str().unwrap().contains("error"), "{x}");
    assert!(x["toldOfMap"].as_str().unwrap().contains("head 0"), "{x}");
    assert_eq!((x["head"].as_str(), x["headByKey"].as_str()), (Some("1"), Some("0")));
    assert_eq!((number("images"), number("recipe")), (2, 4));
    assert!(x["theme"] == "dark" && x["paper"] == "rgb(20, 22, 26)", "{x}");
    assert!(number("formulas") > 10 && number("wide") == 0, "{x}");
    std::fs::remove_dir_all(&folder).unwrap();
}
