// A browser runs no workers for pages that are opened from the disk. There, a hidden frame takes the worker's place, so
// that the search of this site works without a server.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = `<script>
        const answer = data => parent.postMessage({ data }, "*")
        window.postMessage = answer
      <\/script><script src="${script}"><\/script>`
      this.ready = new Promise(done => frame.addEventListener("load", () => done(frame.contentWindow)))
      window.addEventListener("message", event => {
        if (event.source === frame.contentWindow)
          this.dispatchEvent(new MessageEvent("message", { data: event.data.data }))
      })
      document.documentElement.appendChild(frame)
    }

    postMessage(data) {
      this.ready.then(inside => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }
  }
}
