// A page that was opened from disk may start no Worker, and the site's search wants one. There,
// run the worker's script in a hidden frame of the page and hand its messages on.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.onmessage = null
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      inside.postMessage = (data) => {
        const message = new MessageEvent("message", { data: structuredClone(data) })
        this.dispatchEvent(message)
        if (this.onmessage) this.onmessage(message)
      }
      inside.importScripts = (...urls) =>
        urls.reduce((before, each) => before.then(() => this.load(each)), Promise.resolve())
      this.loaded = this.load(url)
    }
    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.frame.contentDocument.createElement("script")
        script.src = new URL(url, location.href)
        script.onload = resolve
        script.onerror = reject
        this.frame.contentDocument.body.append(script)
      })
    }
    postMessage(data) {
      this.loaded.then(() => {
        const inside = this.frame.contentWindow
        const message = new inside.MessageEvent("message", { data: structuredClone(data) })
        inside.dispatchEvent(message)
      })
    }
    terminate() {
      this.frame.remove()
    }
  }
}
