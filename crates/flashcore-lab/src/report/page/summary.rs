//! The top of the page: how many times as fast, against whom, on what; one card per series.

use crate::report::{
    markup::Element,
    run::Run,
    series::{Lead, Series},
    wording,
};

/// The cards.
pub(super) fn summary(named: &[(String, &Series)]) -> Element {
    let cards = named.iter().map(|(id, series)| card(id, series));
    Element::new("nav").attr("aria-label", "Summary").class("cards").all(cards)
}

fn card(id: &str, series: &Series) -> Element {
    let run = series.newest();
    let link = Element::new("a").attr("href", format!("#{id}")).with(series.title());
    let leads = run.leads();
    let figures: Vec<_> = match leads.is_empty() {
        true => vec![Element::new("li").with(nothing_compared(run))],
        false => leads.iter().map(|lead| headline(run, lead)).collect(),
    };
    Element::new("article")
        .with(Element::new("h2").with(link))
        .with(Element::new("p").class("soft").with(origin(run)))
        .with(Element::new("ul").all(figures))
}

/// Where and when.
fn origin(run: &Run) -> String {
    let driver = run.record.machine.driver.as_ref().filter(|_| run.on_gpu);
    let driver = driver.map_or(String::new(), |driver| format!(", driver {driver}"));
    let (date, commit) = (wording::date(&run.record.created), wording::commit(run.record.commit.as_deref()));
    format!("{}{driver}; {date}; {commit}", run.device())
}

fn nothing_compared(run: &Run) -> String {
    let what = if run.ours.is_some() { "no peer" } else { "no FlashCore" };
    format!("{} timed, {what} in this run", wording::count(run.problems.len(), "problem"))
}

fn headline(run: &Run, lead: &Lead) -> Element {
    let big = Element::new("strong")
        .class(if lead.mean < 1.0 { "miss" } else { "" })
        .with(wording::times(lead.mean));
    let name = format!("as fast as {}", run.title(&lead.peer));
    let Lead { least, most, faster, slower, problems, .. } = lead;
    let slow = if *slower > 0 { format!(", slower on {slower}") } else { String::new() };
    let range = format!("{} to {}", wording::times(*least), wording::times(*most));
    let small = format!("{range}; faster on {faster} of {problems}{slow}");
    Element::new("li").with(big).with(Element::new("span").with(name)).with(Element::new("small").with(small))
}
