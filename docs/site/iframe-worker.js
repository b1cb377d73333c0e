// Search runs in a worker, which a page that was opened as a file may not start: here it runs in a frame instead.
// Nothing is loaded from elsewhere.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      inside.postMessage = data => this.hear(data)
      this.inside = inside
      inside.importScripts = (...urls) => urls.reduce((before, each) => before.then(() => this.load(each)), Promise.resolve())
      this.load(url).then(() => { this.ready = true; this.waiting.splice(0).forEach(m => this.tell(m)) })
    }
    load(url) {
      return new Promise(resolve => {
        const script = this.inside.document.createElement("script")
        script.src = url
        script.onload = resolve
        this.inside.document.body.append(script)
      })
    }
    hear(data) { const e = new MessageEvent("message", { data }); this.dispatchEvent(e); this.onmessage?.(e) }
    tell(data) { this.inside.dispatchEvent(new MessageEvent("message", { data })) }
    postMessage(data) { this.ready ? this.tell(data) : this.waiting.push(data) }
    terminate() { this.frame.remove() }
  }
}
